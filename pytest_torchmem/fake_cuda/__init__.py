"""A CUDA device that is not there: identity, memory and the answers of torch.cuda."""

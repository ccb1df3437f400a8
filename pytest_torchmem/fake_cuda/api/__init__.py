"""What torch.cuda and its neighbours answer during a trace."""

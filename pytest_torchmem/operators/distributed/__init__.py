"""What is known of the operators of ``torch.distributed``."""

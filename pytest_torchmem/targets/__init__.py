"""The machines a trace stands for: hosts, GPUs, and what was measured on them."""

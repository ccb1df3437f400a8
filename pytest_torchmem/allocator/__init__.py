"""Replay of torch's CUDA caching allocator: what is allocated and reserved for given requests.

Nothing here needs torch.
"""

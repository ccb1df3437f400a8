"""A CUDA device that is not there: its Python API, memory, decompositions and autocast."""

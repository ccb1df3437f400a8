"""Functions, methods and classes of torch that know of fake cuda."""

"""Short programs that call a library as its documentation shows; one function for each.

The function's body runs before the trace (imports, data); what it returns is the program.
"""

"""Operators intercepted and booked: hollow tensors, plans, the ledger."""

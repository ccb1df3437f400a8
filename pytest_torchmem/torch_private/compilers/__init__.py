"""Dynamo, AOTAutograd, Inductor and what they leave to kernels."""

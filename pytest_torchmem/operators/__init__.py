"""What is known of operators: one record each, by family."""

"""How a worker lives among others: signals it obeys."""

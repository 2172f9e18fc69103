"""What a job says of itself: progress while it runs, costs, and the text at its start and end."""

"""Many workers on one job: who does what, who is alive, who goes on where another ended. No torch."""

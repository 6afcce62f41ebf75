"""Training drafter networks."""

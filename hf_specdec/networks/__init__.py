"""Networks of drafters, each family in a folder of its own with `configuration` and `modeling`."""

"""The bundled demonstration pair: how it is built, its weights, and the live display."""

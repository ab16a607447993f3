"""How an option is declared: its type, bounds, unit and text; what all sections share."""

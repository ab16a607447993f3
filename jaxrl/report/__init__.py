"""A run's page: one self-contained HTML file."""

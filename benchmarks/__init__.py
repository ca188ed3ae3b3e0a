"""How fast labkit is beside what one would use otherwise; `make bench` prints the table."""

"""Matrix product of rows with one weight matrix per group of rows."""

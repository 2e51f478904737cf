"""What a run of many processes costs: measured in each rank, fitted, drawn."""

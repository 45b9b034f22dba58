"""What the scheduler decides with: values, learnt costs, stock, demand, breakers. No I/O, no clock."""

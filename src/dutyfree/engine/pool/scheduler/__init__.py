"""What the scheduler decides with: values, learnt costs, stock, wishes, breakers. No I/O, no clock."""

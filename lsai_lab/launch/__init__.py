"""Runs of several processes: started here or by srun (launch), watched (watch), at work (worker), and ended together."""

"""What this machine is and what it can run: profiles, hardware, and the checks of `lsai doctor`."""

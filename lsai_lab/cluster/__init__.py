"""Studies as cluster jobs: what a cluster is, the script a job runs, its submission and what became
of it (Slurm)."""

"""lsai_lab: the laboratory around the core. Studies, runs, records, searches, benches, peers, clusters and the report."""

"""The same training with other people's trainers: what the `peer` kind starts, each in processes of
its own."""

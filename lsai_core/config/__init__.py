"""What one training run is: its settings with their bounds, the model's shapes, and the dtypes of a
precision."""

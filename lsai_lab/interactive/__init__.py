"""What a person does in a notebook beside reading records: open, watch, compare and sweep runs, ask
for predictions, look into a model and into a step."""

"""What single chapters of the book compute from records, where it is more than a few lines; they
use it as `lab.<name>`."""

"""What one training job holds, what a step of it moves, and how long that takes."""

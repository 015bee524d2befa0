"""What is trained beside a frozen model: low-rank updates and soft prompts."""

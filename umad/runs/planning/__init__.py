"""What `umad plan` knows: model shapes, GPUs, memory, compute."""

"""Accelerate's `Accelerator`, made elastic."""

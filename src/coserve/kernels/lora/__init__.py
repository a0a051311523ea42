"""Batched LoRA: low-rank products of rows that belong to many adapters."""

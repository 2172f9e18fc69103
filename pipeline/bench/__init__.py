"""Measures an engine on a fixed workload: `python -m pipeline.run conf=bench`. The flow is benchmark.py."""

"""What benchmarks measure with: clocks, and readers of what compiled programs run."""

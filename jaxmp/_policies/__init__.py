"""The dtypes that a model uses: policies, and rules that give its parts other policies."""

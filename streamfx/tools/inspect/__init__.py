"""`explain`, `verify`, `compare` and `profile`: run the backend on one call and report the result.

The package knows `frontend` (it drives the compilation), the cost model, and `tools.report`, which renders the figures. It may
import `frontend` and every layer below; only the planner, the integrations and the command line may import it. It restores
every model and every global setting that it changes.
"""

"""Tools that run the backend to look at it: `explain`, `verify`, and the tracing behind them."""

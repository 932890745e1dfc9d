"""KV memory: how much there is, which pages are free, and where each request's tokens lie. numpy only."""

"""The HTTP server: routes, TLS, authentication, and limits on what a client can cost."""

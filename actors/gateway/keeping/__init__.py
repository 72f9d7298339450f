"""Connections that outlive the gateway, and the answers under way on them."""

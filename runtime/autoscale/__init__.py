"""How many processes of each kind a live run needs: looks at it, figures, proposals (MS4)."""

"""Methods side by side: timed, compared, checked."""

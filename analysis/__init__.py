"""Run records to tables, plots and a report; reads files, and never imports torch."""

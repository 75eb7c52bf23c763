"""Run records to tables, plots and a report; reads files, and never imports torch."""

from layerskip.analysis.report import write_report

__all__ = ["write_report"]

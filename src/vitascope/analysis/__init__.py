"""Questions about models and data: explanations, reports, probes, searches, audits."""

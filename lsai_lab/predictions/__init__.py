"""Predictions beside what was measured or published, and the questions 'will it fit' and 'which
technique'."""

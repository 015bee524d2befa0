"""Records of each step, charts of the records, and a model of the exposed communication."""

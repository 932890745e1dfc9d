// How a step is cut into slices that threads take each for itself.
#pragma once

#include "step_plan.h"

namespace llmd {

// Whether there are ever such steps, with so many threads.
bool may_part(int threads);

// Rows of a slice, or 0: all threads had better share each operation. A pure function of what is to be done.
int rows_apart(const Step& step, const ProgramShape& shape, int threads);

}  // namespace llmd

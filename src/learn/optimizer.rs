//! Update rules and step-size schedules over flat buffers.

//! Every algorithm, instruction set and element type equals the naive definition.

mod common;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_kernel_equals_the_definition(case in common::any_case()) {
        common::check_any(&case)?;
    }
}

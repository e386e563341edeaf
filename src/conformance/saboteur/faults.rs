//! Which deliberate faults are there?

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Honest,
    // Memory.
    UploadsRoundedUp,
    FillsOneWordMore,
    CopiesOneWordLess,
    SizesWrapAround,
    MisalignedOffsetsRoundedDown,
    UploadsLostNowAndThen,
    /// Allocations of host memory fail from this one on until that one.
    LacksHostMemory(u32, u32),
    // Swaps.
    LosesTheLastSwap,
    SwapsTwoRecords,
    SwapsInTheWrongOrder,
    IgnoresTheHostOffset,
    WritesBehindTheRecord,
    // Append.
    SwapsKAndV,
    RoundsByTruncation,
    WritesWhenToldNotTo,
    LosesTheLastToken,
    WritesTheNextSlot,
    CountsNothing,
    // Every operation with an arena, or with a grid.
    KnowsOneSlab,
    GridOf65535,
    // Transfer.
    LosesTheLastMove,
    SwapsTwoMoves,
    // Attend.
    DropsTheLastToken,
    ReadsPastTheEnd,
    IgnoresTheWindow,
    AsksOneQueryForAllHeads,
    ScalesWrongly,
    DependsOnTheBatch,
    DependsOnTheSlabs,
    DependsOnTheTime,
    SplitsWrongly,
    // Merge.
    DropsTheLastState,
    LogsInBase2,
    FiniteMinusInfinity,
    LeavesEmptyRows,
    // Fold.
    FoldsOneStateLess,
    FoldsElsewhereOnly,
    FoldsNothingToNothing,
    LosesTheSignOfZero,
    LosesWhatScoresLack,
    // Project and score.
    OneMatrixForAllHeads,
    ForgetsTheOffset,
    ProjectsTheNextSlot,
    ScoresOneTokenLess,
    ScoresOneTokenMore,
    ScoresTheFirstRow,
    // Tiers.
    LosesTheLastPageOut,
    LosesTheLastPageIn,
    TakesTheNeighboursPage,
    KeepsOldRecords,
}

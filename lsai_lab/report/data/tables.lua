-- Both engines' tables: columns as wide as their content, and what is short stays on one line in the browser.

function Table(table)
  -- pandoc spreads a table with long source lines over the page by its dashes.
  for index, spec in ipairs(table.colspecs) do
    table.colspecs[index] = { spec[1], nil }
  end
  for _, body in ipairs(table.bodies) do
    for _, row in ipairs(body.body) do
      for _, cell in ipairs(row.cells) do
        if utf8.len(pandoc.utils.stringify(cell.contents)) <= 26 then cell.classes:insert("short") end
      end
    end
  end
  return table
end
